"""The command line: sub-commands, each a few lines that call one function."""

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from zayajax import __version__, config as configs, machine as machines
from zayajax.errors import Exit, NotMet, ReplicasDiffer, UserError
from zayajax.launch import command
from zayajax.layout import TRAINED

# A full disk, a folder that may not be written: not our mistake, so no traceback.
OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
OF_THE_MACHINE |= {errno.EISDIR, errno.ENOTDIR}


ABOUT = "Trains, samples and converts ZAYA mixture-of-experts models, and reports on runs."
# --section.key value may follow; and options of their own that are called like a key of a config.
WITH_CONFIG = {"train": (), "audit": ("nodes", "layout"), "plan": ("nodes",)}
SKIPS = ("identity", "zero")
SKIP_HELP = (
    "of transformers' weights: what a token that skips its expert adds, p * h or (as there) 0"
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command; 0 is success, 2 a user's mistake, said in one sentence on standard error."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        overrides, words = {}, []
        if argv[:1] == ["launch"] and "--" in argv:
            at = argv.index("--")
            argv, words = argv[:at], argv[at + 1 :]
        if argv[:1] and argv[0] in WITH_CONFIG:
            argv, overrides = _take_overrides(argv, WITH_CONFIG[argv[0]])
        args = _parser().parse_args(argv, argparse.Namespace(overrides=overrides, words=words))
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UserError as error:
        print(f"zayajax: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        print(f"zayajax: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        return 2
    except ReplicasDiffer as error:
        print(f"zayajax: {error}", file=sys.stderr)
        return Exit.SUSPECT
    except KeyboardInterrupt:
        print("zayajax: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zayajax", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"zayajax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="every key of the config can be set:\n" + configs.describe().replace("%", "%%"),
    )
    train.add_argument("config", type=Path, help="a TOML file, such as configs/tiny.toml")
    train.add_argument("--run-dir", type=Path, help="where all output goes [runs/NAME of CONFIG]")
    train.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    train.add_argument("--fresh", action="store_true", help="delete the run in that folder first")
    train.add_argument("--init-from", type=Path, metavar="CKPT", help="start from these weights")
    joining = train.add_argument_group("several processes", "by default what the launcher says")
    joining.add_argument("--coordinator", metavar="HOST:PORT", help="on the host of process 0")
    joining.add_argument("--processes", type=int, metavar="P", help="how many there are")
    joining.add_argument("--process", type=int, metavar="I", help="which this is, from 0")
    joining.add_argument(
        "--join-timeout", type=float, default=300.0, metavar="S", help="seconds to meet in [300]"
    )
    train.set_defaults(run=_train)

    command.add(commands).set_defaults(run=_launch)

    generate = commands.add_parser("generate", help="continue a text")
    generate.add_argument("model", type=Path, help="a run, a checkpoint, or transformers' folder")
    generate.add_argument("--prompt", required=True, help="the text to continue")
    generate.add_argument("--tokens", type=int, default=200, help="new tokens [200]")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest [0.8]")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--skip", choices=SKIPS, default="identity", help=SKIP_HELP)
    generate.add_argument("--tokenizer", help="'bytes' or a tokenizer.json [the model's own]")
    generate.set_defaults(run=_generate)

    convert = commands.add_parser("convert", help="transformers' checkpoints in and out")
    ways = convert.add_subparsers(dest="way", required=True, metavar="WAY")
    from_hf = ways.add_parser("from-hf", help="transformers' folder to a zayajax checkpoint")
    from_hf.add_argument("source", type=Path)
    from_hf.add_argument("destination", type=Path)
    from_hf.add_argument("--skip", choices=SKIPS, default="identity", help=SKIP_HELP)
    from_hf.set_defaults(run=_from_hf)
    to_hf = ways.add_parser("to-hf", help="a run or checkpoint to transformers' folder")
    to_hf.add_argument("source", type=Path)
    to_hf.add_argument("destination", type=Path)
    to_hf.add_argument("--layout", choices=("native", "legacy"), default="native")
    to_hf.set_defaults(run=_to_hf)
    check = ways.add_parser(
        "check", help="is transformers' folder whole, and does it compute right"
    )
    check.add_argument("source", type=Path)
    check.add_argument("--reference", type=Path, help="expected.npz with inputs and their logits")
    check.set_defaults(run=_check)

    audit = commands.add_parser("audit", help="every collective and the memory of a step, traced")
    audit.add_argument("config", type=Path)
    _of_machine(audit)
    audit.add_argument("--layout", choices=TRAINED, help="[mesh.layout of CONFIG]")
    audit.add_argument("--step", choices=("train", "eval", "decode"), default="train")
    audit.add_argument("--compile", action="store_true", help="also look for others, compiled")
    audit.set_defaults(run=_audit)

    plan = commands.add_parser("plan", help="memory and time of each way to run, by arithmetic")
    plan.add_argument("what", metavar="CONFIG", help="or: collectives, what each costs")
    _of_machine(plan)
    plan.set_defaults(run=_plan)

    bench = commands.add_parser("bench", help="measures the devices at hand")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="NAME")
    collectives = benches.add_parser("collectives", help="each operation, by size and group")
    collectives.add_argument("--largest", metavar="BYTES", help="of a message, such as 64MiB")
    collectives.add_argument("--json", action="store_true", help="for programs")
    collectives.set_defaults(run=_bench_collectives)
    checkpoint = benches.add_parser("checkpoint", help="how long saving blocks a step, and writes")
    checkpoint.add_argument("--bytes", default="2GiB", help="of the state [2GiB]")
    checkpoint.add_argument(
        "--folder", type=Path, default=Path(), help="on the disk to write to [the current one]"
    )
    checkpoint.add_argument("--json", action="store_true", help="for programs")
    checkpoint.set_defaults(run=_bench_checkpoint)

    doctor = commands.add_parser("doctor", help="what is wrong with this machine")
    doctor.add_argument("--coordinator", metavar="HOST:PORT", help="of a run to come")
    doctor.add_argument(
        "--run-dir", type=Path, default=Path("runs"), help="of a run to come [runs]"
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(run=_doctor)

    report = commands.add_parser("report", help="a run as one HTML page")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(run=_report)
    return parser


def _of_machine(parser):
    parser.add_argument("--nodes", type=int, metavar="N", help="[mesh.nodes of CONFIG]")
    parser.add_argument(
        "--machine", type=machines.named, default="MI300X", help="what a node is of [MI300X]"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)  # --fres must not delete a run

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _take_overrides(argv: list[str], own: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes --section.key value and --section.key=value out of the words, wherever they stand."""
    left, found, words = [], {}, iter(argv)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            if word.startswith("--") and key not in own and (meant := configs.named(key)):
                raise UserError(f"{word}: unknown argument; did you mean --{meant}?")
            left.append(word)
            continue
        if not equals and (value := next(words, None)) is None:
            raise UserError(f"{word}: a value is missing after it")
        found[key] = value
    return left, found


def _train(args):
    config = configs.load(args.config, args.overrides)
    from zayajax.launch.cluster import find
    from zayajax.training.loop import train

    joining = args.coordinator, args.processes, args.process
    cluster = find(os.environ, *joining, timeout=args.join_timeout)
    with _ends_together(cluster):
        result = train(
            config,
            _run_dir(args),
            resume=args.resume,
            fresh=args.fresh,
            init_from=args.init_from,
            cluster=cluster,
            command=True,
        )
    return result.stopped


@contextlib.contextmanager
def _ends_together(cluster):
    """Where a process of several fails, it leaves at once: JAX's own exit waits for the others,
    who may be gone, for more than a minute."""
    from zayajax.launch.supervisor import ATTEMPTED
    from zayajax.training.interrupts import leave

    try:
        yield
    except BaseException as error:
        if cluster is None:
            raise
        if isinstance(error, UserError):
            # On another start of all they may meet: not a mistake that stays one.
            lost = isinstance(error, NotMet) and ATTEMPTED in os.environ
            status = Exit.LOST if lost else Exit.MISTAKE
            leave(status, f"zayajax: process {cluster.process}: {error}")
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            what = f"{error.filename or 'a file'}: {error.strerror}"
            leave(Exit.MISTAKE, f"zayajax: process {cluster.process}: {what}")
        if isinstance(error, ReplicasDiffer):
            leave(Exit.SUSPECT, f"zayajax: {error}")
        traceback.print_exc()
        lost = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
        lost = lost and "RESOURCE_EXHAUSTED" not in str(error)  # memory: this process's own
        leave(Exit.LOST if lost else 1)


def _run_dir(train) -> Path:
    return train.run_dir or Path("runs") / train.config.stem


def _launch(args):
    train, config = _launched(args.words)
    return command.launch(args, _run_dir(train), config, train.join_timeout)


def _launched(words: list[str]):
    """The arguments of the `train` to launch, and its config: its mistakes are said at once."""
    if words[:1] != ["train"]:
        raise UserError("launch: name what to run, as in: zayajax launch -- train CONFIG")
    left, overrides = _take_overrides(words, WITH_CONFIG["train"])
    train = _parser().parse_args(left)
    for name in ("coordinator", "processes", "process"):
        if getattr(train, name) is not None:
            raise UserError(f"--{name} after --: launch sets it; leave it out there")
    return train, configs.load(train.config, overrides)


def _generate(args):
    from zayajax import generate, weights
    from zayajax.data import tokenizer

    model = weights.read(args.model, skip=args.skip)
    words = tokenizer.load(args.tokenizer or weights.tokenizer_of(args.model))
    prompt = words.encode(args.prompt).tolist()
    prompt = ([] if words.bos is None else [words.bos]) + prompt
    (new,) = generate.generate(
        model,
        [prompt],
        args.tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop=[] if words.eos is None else [words.eos],
    )
    print(args.prompt + words.decode(new))


def _from_hf(args):
    from zayajax import weights

    print(weights.from_hf(args.source, args.destination, args.skip))


def _to_hf(args):
    from zayajax import weights

    print(weights.to_hf(args.source, args.destination, args.layout))


def _check(args):
    from zayajax import hf

    found = hf.check(args.source, args.reference)
    print(found)
    return 0 if found.passed else 1


def _report(args):
    from zayajax.report import write_report

    print(write_report(args.run_dir))


def _doctor(args):
    from zayajax.launch.doctor import diagnose

    found = diagnose(coordinator=args.coordinator, runs=args.run_dir)
    print(json.dumps(list(found.rows), indent=1) if args.json else found)
    return 0 if found.ok else 1


def _audit(args):
    from zayajax.planning import audit

    config = _scaled(args.config, args, args.layout)
    found = audit.audit(config, args.machine, step=args.step, compile=args.compile)
    print(json.dumps(found.to_json(), indent=1) if args.json else found)
    return 0 if found.ok else 1


def _plan(args):
    if args.what == "collectives":
        if args.nodes is not None or args.overrides:
            raise UserError("plan collectives: lists 2 to 128 nodes, and takes --machine alone")
        from zayajax.planning.fabric import collective_table

        found = collective_table(args.machine)
        print(json.dumps(list(found.rows), indent=1) if args.json else found.wrapped())
        return
    from zayajax.planning import plan

    found = plan.plan(_scaled(Path(args.what), args), args.machine)
    print(json.dumps(found.to_json(), indent=1) if args.json else found)


def _scaled(path, args, layout=None):
    """The config on the nodes that are asked for, with as many tokens a GPU as it says."""
    from zayajax.planning.scale import batch_at

    if args.nodes is not None and args.nodes < 1:
        raise UserError(f"--nodes: must be positive, and is {args.nodes}")
    as_it_is, given = configs.load(path), dict(args.overrides)
    for key, value in (("nodes", args.nodes), ("layout", layout)):
        if value is not None and given.setdefault(f"mesh.{key}", str(value)) != str(value):
            raise UserError(
                f"--{key} {value}: --mesh.{key} is {given[f'mesh.{key}']}; leave one out"
            )
    given.setdefault("mesh.gpus", str(args.machine.gpus))
    if "train.batch" not in given:
        counts = given.get("mesh.nodes", str(as_it_is.mesh.nodes)), given["mesh.gpus"]
        if all(n.isdecimal() and int(n) for n in counts):  # any other is refused below
            given["train.batch"] = str(batch_at(as_it_is, *map(int, counts)))
    return configs.load(path, given)


def _bench_collectives(args):
    from zayajax.bench import collectives

    found = collectives.measure(args.largest)
    print(json.dumps(list(found.rows), indent=1) if args.json else found)


def _bench_checkpoint(args):
    from zayajax.bench import checkpoint

    found = checkpoint.measure(args.bytes, args.folder)
    print(json.dumps(list(found.rows), indent=1) if args.json else found)
