"""Matrix products of consecutive groups of rows, each group with a matrix of its own.

Shape letters: T rows, D in, F out, E groups.
"""

import jax


def grouped_matmul(x_TD, w_EDF, sizes_E):
    """Rows of group e times `w_EDF[e]`: `[T, F]` in the dtype of x.

    Groups follow each other; rows past the last group may come out as anything.
    """
    if w_EDF.shape[0] == 1:  # one expert a GPU: rows past the group are zero, and cost little
        return x_TD @ w_EDF[0]
    return jax.lax.ragged_dot(x_TD, w_EDF, sizes_E)
