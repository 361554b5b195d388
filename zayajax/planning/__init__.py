"""What a job costs, said before it runs: `audit` by its traced program, `plan` by arithmetic."""
