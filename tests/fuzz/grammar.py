"""Command lines from the options that each command names, and factories of models that misbehave."""

import re
from collections.abc import Iterator
from typing import Any, Final

from hypothesis import strategies as st
from typer.main import get_command

from perfmodel.cli import app
from tests.fuzz.nonsense import HOSTILE, layouts

_INTEGERS: Final = (
    "1",
    "2",
    "4",
    "8",
    "16",
    "64",
    "100",
    "1024",
    "16384",
    "0",
    "-1",
    "100000",
    "10000000000",
)
_FLOATS: Final = ("0", "0.5", "1", "2.5", "10", "100", "1e6", "1e-9", "1e12", "1e300", "-1", "0.95")
_UNITS: Final = (
    "B",
    "kB",
    "GB",
    "GiB",
    "TiB",
    "Gb/s",
    "GB/s",
    "us",
    "ms",
    "s",
    "min",
    "h",
    "x",
    "%",
    "",
)
_MODELS: Final = (
    *(
        "gpt2-xl",
        "llama2-7b",
        "llama3-8b",
        "llama3-405b",
        "7b",
        "0.001b",
        "light",
        "heavy",
        "mlp",
        "lenet",
        "resnet18",
    ),
    *(
        "torchvision:resnet18",
        "torchvision:x",
        "timm:x",
        "{net}:model",
        "{net}:x",
        "{config}",
        "{yaml}",
        "{traced}",
    ),
)
_DEVICES: Final = (
    "h100-sxm5",
    "h100-sxm",
    "a100-sxm4-80gb",
    "A100",
    "v100",
    "rtx-3090",
    "H100",
    "b200",
    "cpu",
    "tpu",
)
_MACHINES: Final = (
    "{stored}",
    "{inferred}",
    "{measured}",
    "dgx-a100",
    "dgx-h100",
    "{slower}",
    "{traced}",
    "{plan}",
)
_FILES: Final = (
    *(
        "{stored}",
        "{inferred}",
        "{traced}",
        "{plan}",
        "{budget}",
        "{tmp}",
        "{measured}",
        "{log}",
        "{nccl}",
        "{runs}",
    ),
    *(
        "{cluster}",
        "{columns}",
        "{steps}",
        "{config}",
        "{yaml}",
        "{clauses}",
        "{goodput}",
        "{validation}",
        "{folder}",
    ),
    *(
        "{truth}",
        "{net}",
        "{observations}",
        "/dev/null",
        "/dev/zero",
        "{tmp}/missing",
        "/proc/self/mem",
        ".",
        "",
    ),
)


def _one(*texts: str) -> st.SearchStrategy[str]:
    return st.sampled_from(texts)


def _joined(
    separator: str, each: st.SearchStrategy[str], *, most: int = 4
) -> st.SearchStrategy[str]:
    return st.lists(each, min_size=1, max_size=most).map(separator.join)


def _pair(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(form.format, *parts)


_NUMBER: Final = _one(*_INTEGERS, *_FLOATS)
_QUANTITY: Final = _pair("{}{}", _NUMBER, _one(*_UNITS))
_OBSERVED: Final = st.one_of(
    _pair("{} GPUs: {} s", _one(*_INTEGERS), _NUMBER),
    _pair("{} nodes of {}: {} tokens/s per GPU", _one(*_INTEGERS), _one(*_INTEGERS), _NUMBER),
    _pair("{}x{}: {}", _one(*_INTEGERS), _one(*_INTEGERS), _QUANTITY),
    _pair("{} GPUs {} {}", _one(*_INTEGERS), layouts, _QUANTITY),
    _pair("MFU {}%, {} GPUs", _NUMBER, _one(*_INTEGERS)),
)
_FIELDS: Final = (
    *(
        "network.bandwidth",
        "network.latency",
        "network.algorithm",
        "device",
        "memory.bandwidth",
        "precision",
    ),
    *(
        "accumulation",
        "bucket_cap",
        "batch",
        "devices",
        "layout",
        "loader.samples_per_s",
        "ranks.noise",
        "device.speed",
    ),
    *("link.gbps", "overlap", "zero", "micro_batch", "sequence"),
)
_TEXTS: Final[dict[str, st.SearchStrategy[str]]] = {
    "--layout": layouts,
    "--set": _pair(
        "{}={}",
        _one(*_FIELDS),
        st.one_of(_QUANTITY, _one("ring", "tree", "bf16", "h100-sxm5", "none")),
    ),
    "--observed": _OBSERVED,
    "--part": _pair("{}, {}", _one("a", "b", "node 3", ""), _OBSERVED),
    "--cluster": st.one_of(
        _one("{cluster}", "{plan}"),
        _joined(
            ", ",
            _pair(
                "{} {}",
                _one(*_INTEGERS),
                st.one_of(_QUANTITY, _one("nvlink3", "eth-100", "ib-ndr", "x")),
            ),
        ),
    ),
    "--nodes-like": _one(*_MACHINES),
    "--cause": _pair("{}={}", _one("gpu", "net", "", "a b"), _NUMBER),
    "--points": _joined(",", _pair("{}={}", _NUMBER, _NUMBER)),
    "--samples-per-s": _joined(",", _pair("{}={}", _NUMBER, _NUMBER)),
    "--workload": _one(*("light", "heavy", "{traced}", "resnet18") * 4, *_MODELS),
    "--workloads": _joined(",", _one("light", "heavy", *_MODELS)),
    "--models": _joined(",", _one(*_MODELS)),
    "--model": _one(*_MODELS),
    "--device": _one(*_DEVICES),
    "--budget": _one("quick", "standard", "thorough", "x"),
    "--truth": _one("balanced", "two-nodes", "{truth}", "{cluster}", "x"),
    "--log-format": _one(
        "hf", "megatron", "torchtitan", "regex:(?P<s>[0-9.]+)", "regex:((a+)+)+$(?P<s>x)", "regex:("
    ),
    "--collective": _one("all_reduce", "all_gather", "broadcast", "x"),
    "--sources": _one("a100", "nccl_times", "mlperf", "x", "a100,a100"),
    "--torch": _one("2.1", "2.12.0", "1", "x"),
    "--nccl": _one("2.18.3", "2.27", "1", "x"),
    "--master-addr": _one("127.0.0.1", "localhost", "x", ""),
    "--name": _one("a", "a/b"),
    "model": _one(*_MODELS),
    "name": _one(*_DEVICES, *_MACHINES),
}
_BY_METAVAR: Final[dict[str, st.SearchStrategy[str]]] = {
    "N": _one(*_INTEGERS),
    "X": _NUMBER,
    "MINUTES": _NUMBER,
    "N,N,...": _joined(",", _one(*_INTEGERS)),
    "X,X,...": _joined(",", _NUMBER),
    "SIZE": _QUANTITY,
    "RATE": _QUANTITY,
    "YYYY-MM-DD": _one("2026-11-21", "2026-02-30", "0001-01-01", "9999-12-31", "2026-1-1", "x"),
    "FILE": _one(*_MACHINES[:5] * 6, *_MACHINES, *_FILES),
}
#: Options whose file is written: always below the folder of the command.
_WRITTEN: Final = ("--output", "--out", "--plot", "--export", "--trace", "--report", "--campaign")
_TARGETS: Final = (
    "written",
    "new/folder/written.json",
    "a b",
    "written.svg",
    "written.csv",
    "written.toml",
    ".hidden",
)
_HOSTILE: Final = tuple(
    text.replace("\0", "").encode("utf-8", "replace").decode() for text in HOSTILE
)


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    names = getattr(command, "commands", {})
    if not names or path == ("validate",):
        yield path, command
    for name in names:
        yield from _commands(command.get_command(None, name), (*path, name))


#: Every command with its parameters.
COMMANDS: Final = dict(_commands(get_command(app)))


def _value(flag: str, metavar: str) -> st.SearchStrategy[str]:
    if flag in _WRITTEN:
        return _one(*_TARGETS)
    if metavar.startswith("["):
        usual = _one(*re.findall(r"[\w-]+", metavar))
    else:
        usual = _TEXTS.get(flag, _BY_METAVAR.get(metavar, _one(*_FILES)))
    return st.one_of(*[usual] * 11, _one(*_HOSTILE))


@st.composite
def whole_lines(draw: st.DrawFn) -> list[str]:
    """Any command with what it needs and some of its options, each value of its kind or nonsense."""
    path = draw(st.sampled_from(list(COMMANDS)))
    words, optional = list(path), []
    for parameter in COMMANDS[path].params:
        flag = parameter.opts[0]
        if flag in ("--help", "--version") or "completion" in flag:
            continue
        if parameter.required or (not flag.startswith("-") and draw(st.booleans())):
            value = draw(_value(flag, parameter.metavar or ""))
            words += [flag, value] if flag.startswith("-") else [value]
        elif flag.startswith("-"):
            optional.append(parameter)
    chosen = draw(st.lists(st.sampled_from(optional), max_size=3, unique_by=id)) if optional else []
    usual = [each for each in optional if each.opts[0] in ("--profile", "--workload", "--set")]
    chosen += [each for each in usual if each not in chosen and draw(st.integers(0, 7))]
    for parameter in chosen:
        flag = parameter.opts[0]
        times = draw(st.integers(1, 3)) if getattr(parameter, "multiple", False) else 1
        for _ in range(times):
            is_flag = getattr(parameter, "is_flag", False)
            words += [flag] if is_flag else [flag, draw(_value(flag, parameter.metavar or ""))]
    return words


_MODULES: Final = (
    *(
        "nn.Linear(4, 3)",
        "nn.Sequential()",
        "nn.Linear(4, 3).double()",
        "nn.LazyLinear(3)",
        "nn.Embedding(5, 4)",
    ),
    *(
        "nn.LSTM(4, 3)",
        "nn.Conv2d(4, 3, 1)",
        "nn.BatchNorm1d(4)",
        "nn.Dropout(1.0)",
        "nn.MultiheadAttention(4, 2)",
    ),
    *(
        "nn.Linear(4, 3, device='meta')",
        "nn.Linear(4, 3).requires_grad_(False)",
        "nn.Linear",
        "None",
        "7",
        "Own",
    ),
    *(
        "nn.Linear(4, 10**9, device='meta')",
        "nn.ModuleList([nn.Linear(4, 3)])",
        "nn.ParameterDict()",
        "lambda x: x",
    ),
    *(
        "nn.Sequential(*[nn.Linear(4, 4) for _ in range(300)])",
        "nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))",
    ),
    *(
        "nn.Sequential(*[nn.Linear(4, 4)] * 5)",
        "torch.jit.script(nn.Linear(4, 3))",
        "nn.TransformerEncoderLayer(4, 2)",
    ),
    *(
        "nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))",
        "nn.Linear(4, 3).half()",
        "nn.Linear(4, 0)",
        "Deep()",
    ),
    *(
        "torch.fx.symbolic_trace(nn.Linear(4, 3))",
        "nn.Linear(4, 3, dtype=torch.complex64)",
        *["Own()"] * 12,
    ),
)
_INPUTS: Final = (
    *["torch.zeros(2, 4)"] * 12,
    *(
        "torch.zeros(0, 4)",
        "torch.zeros(4)",
        "torch.zeros(())",
        "torch.ones(1, 4, dtype=torch.long)",
        "[]",
        "{}",
        "None",
    ),
    *(
        "'x'",
        "torch.zeros(1, 4).to_sparse()",
        "torch.full((1, 4), float('nan'))",
        "torch.zeros(1, 4, device='meta')",
    ),
    *(
        "torch.zeros(1, 4, requires_grad=True)",
        "(torch.zeros(1, 4),) * 2",
        "{'input': torch.zeros(1, 4)}",
    ),
    *(
        "{1: torch.zeros(1, 4)}",
        "torch.zeros(1, 4).expand(7, 4)",
        "torch.zeros(1, 4, dtype=torch.complex64)",
    ),
    *(
        "torch.zeros(4, 4)[::2]",
        "iter([1])",
        "torch.zeros(1, 4).numpy()",
        "torch.zeros(10**6, 4)",
        "nn.Parameter(torch.ones(1, 4))",
    ),
    *(
        "{'input': {'input': [torch.zeros(1, 4)]}}",
        "(torch.zeros(1, 4), 3, 'x', None)",
        "torch.zeros(1, 4).bool()",
    ),
)
_LOSSES: Final = (
    *[""] * 8,
    *(
        ", lambda out: out.sum()",
        ", lambda out: out",
        ", lambda: 1",
        ", lambda out: None",
        ", lambda out: 1 / 0",
    ),
    *(
        ", lambda out: out.sum().item()",
        ", 3",
        ", lambda out: out.detach().sum()",
        ", nn.MSELoss()",
        ", 1, 2, 3",
    ),
    *(
        ", lambda out: out.sum() * float('nan')",
        ", lambda a, b: a",
        ", lambda out: out.sum().backward()",
    ),
)
_STATEMENTS: Final = (
    *["pass"] * 12,
    *(
        "raise RuntimeError('no\\x1b[31m licence')",
        "raise KeyError",
        "raise Strange",
        "raise SystemExit(0)",
        "raise SystemExit('x')",
    ),
    *(
        "sys.exit(3)",
        "raise RecursionError",
        "raise MemoryError('x')",
        "raise StopIteration",
    ),
    *(
        "raise OSError(2, 'x', 'y\\x1b')",
        "raise BrokenPipeError",
        "raise GeneratorExit",
        "raise ExceptionGroup('x', [ValueError('y')])",
    ),
    *(
        "import missing_module",
        "from perfmodel import missing",
        "os.chdir('/')",
        "sys.argv.clear()",
        "sys.stdout = None",
    ),
    *(
        "warnings.simplefilter('error')",
        "warnings.warn('\\x1b[31m')",
        "torch.set_default_dtype(torch.float64)",
    ),
    *(
        "torch.set_grad_enabled(False)",
        "torch.set_default_device('meta')",
        "gc.disable()",
    ),
    *(
        "logging.basicConfig(level=10)",
        "os.environ.clear()",
        "sys.setrecursionlimit(60)",
        "sys.path.clear()",
    ),
    *(
        "torch.manual_seed(10**30)",
        "torch.inference_mode().__enter__()",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    ),
    *(
        "torch.autograd.set_detect_anomaly(True)",
        "assert False",
        "x = 1 / 0",
        "raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')",
    ),
    *(
        "torch.use_deterministic_algorithms(True)",
        "raise type('A' * 3000, (Exception,), {})('b' * 3000)",
        "return",
        "await x",
        "(",
    ),
    *(
        "torch.zeros(10**13)",
        "torch.zeros(3)[5]",
        "torch.ops.aten.missing()",
        "random.seed = None",
        "print('{' * 100)",
    ),
)
_FORWARDS: Final = (
    *["return self.inner(x)"] * 6,
    *(
        "return x",
        "return None",
        "return 3",
        "return x.sum().item()",
        "return self.inner(x) if x.sum() > 0 else x",
        "return [x, {}]",
    ),
    *(
        "return torch.randn(int(x.shape[0]) ** 2, 4)",
        "return self.inner(x).nonzero()",
        "return self.inner(x.detach())",
    ),
    *(
        "return self.inner(x.numpy())",
        "return self.inner(x)[x.shape[0] - 1]",
        "return self.inner(x.repeat(x.shape[0], 1))",
    ),
    *(
        "return self.inner(x).to('cuda')",
        "return self.forward(x)",
        "self.inner = nn.Linear(4, 4); return self.inner(x)",
    ),
    *(
        "return self.inner(torch.zeros(3, 4))",
        "return self.inner(x).backward()",
        "return torch.linalg.svd(self.inner(x))",
    ),
    *(
        "return torch.fft.fft(self.inner(x))",
        "return torch.sort(self.inner(x))[0]",
        "return self.inner(x).unique()",
    ),
    *(
        "return (self.inner(x) for _ in range(2))",
        "return self.inner(x).cumsum(0) / x.shape[0]",
        "self.inner.weight.data = x",
    ),
    *(
        "self.inner.weight.grad = None; return self.inner(x)",
        "torch.cuda.synchronize(); return self.inner(x)",
    ),
    *(
        "return torch.stack([self.inner(row) for row in x])",
        "return torch.utils.checkpoint.checkpoint(self.inner, x)",
    ),
)
_HEAD: Final = """
import gc, logging, os, random, signal, sys, warnings
import torch
from torch import nn
class Strange(Exception):
    def __str__(self): raise self
"""
_BODY: Final = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        {in_forward}
        {forward}
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        inner = self
        for _ in range(400):
            inner.inner = nn.Module(); inner = inner.inner
        inner.weight = nn.Parameter(torch.ones(3))
    def forward(self, x): return x.sum()
{outside}
def make():
    {inside}
    return {model}, {example}{loss}
"""
_SPOILT: Final = (
    "",
    "\0",
    "\ufeff",
    "def make(",
    "\x1b[31m",
    "# coding: x\n",
    "make = 3",
    "from __future__ import x\n",
    "\t\n  x",
)
_ASKING: Final = (
    *["trace {factory}:make --output o.json"] * 4,
    *(
        "trace {factory}:make",
        "trace {factory}:make --json",
        "trace {factory}:missing",
        "trace {factory}:",
        "trace {factory}",
    ),
    "trace {factory}:make --precision bf16 --output o.json",
    "trace {factory}:make --checkpointing per-block --micro-batch 3 --output o.json",
    "trace {factory}:make --device-kind as-cuda --optimizer adamw --output o.json",
    "memory --workload {factory}:make --device h100-sxm5 --json",
    "predict --machine dgx-a100 --workload {factory}:make --devices 1,8 --json",
    "explain --machine dgx-a100 --workload {factory}:make",
    "whatif --machine dgx-a100 --workload {factory}:make --devices 8 --set network.bandwidth=2x",
    "diagnose {factory}:make --device h100-sxm --precision bf16 --micro-batch 1 --observed '8 GPUs: 3 s'",
)


@st.composite
def factories(draw: st.DrawFn) -> tuple[str, str]:
    """The text of a module with a factory, and the command that asks for it."""
    chosen = st.sampled_from
    text = _HEAD + _BODY.format(
        outside=draw(chosen(_STATEMENTS)),
        inside=draw(chosen(_STATEMENTS)),
        in_forward=draw(chosen(_STATEMENTS)),
        forward=draw(chosen(_FORWARDS)),
        model=draw(chosen(_MODULES)),
        example=draw(chosen(_INPUTS)),
        loss=draw(chosen(_LOSSES)),
    )
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(chosen(_SPOILT)) + text[at:]
    return text, draw(chosen(_ASKING))
