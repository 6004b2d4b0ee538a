"""Command lines from the options that each command names, and factories of models that misbehave."""

import re
import shlex
from collections.abc import Iterator
from typing import Any, Final

from hypothesis import strategies as st
from typer.main import get_command

from perfmodel.cli import app
from tests.fuzz.nonsense import HOSTILE, READING, Drawn, joined, layouts, one, texts, words

#: Valid command lines that measure nothing.
_VALID: Final = [f"{line} {{{name}}}" for name, line in READING] + texts("""
devices   machines dgx-a100   batch --points 64=10,128=11   fit {tmp}   fit {folder}   acceptance judge {clauses}
goodput --devices 100 --work-days 10 --mtbf-device-hours 50000 --checkpoint-s 60
network check {nccl} --device h100-sxm5 --nic-bandwidth 400Gb/s --nics 8
calibrate --from-runs {runs} --device A100 --out new/inferred
predict --throughput {throughput} --devices 8
report --profile {stored} --devices 1 --out written
validate published --data {tmp}   validate --from {plan}
predict --machine dgx-a100 --workload torchvision:resnet50 --devices 1,8
memory --machine dgx-a100 --workload {traced}
diagnose llama2-7b --device h100-sxm --precision bf16 --micro-batch 1 --strategy ddp --observed '8x1: 3 s'
diagnose llama2-7b --device h100-sxm --precision bf16 --micro-batch 1 --devices 1 --log {log}
""")
_WHOLE: Final = words("1 2 4 8 16 64 100 1024 16384 0 -1 100000 10000000000")
_INTEGER: Final = one(_WHOLE)
_NUMBER: Final = one([*_WHOLE, *words("0 0.5 1 2.5 10 100 1e6 1e-9 1e12 1e300 -1 0.95")])
_UNITS: Final = words("B kB GB GiB TiB Gb/s GB/s us ms s min h x %")
_MODELS: Final = words("""
gpt2-xl llama2-7b llama3-8b llama3-405b 7b 0.001b light heavy mlp lenet resnet18 torchvision:resnet18
torchvision:x timm:x {net}:model {net}:x {config} {yaml} {traced}
""")
_DEVICES: Final = words("h100-sxm5 h100-sxm a100-sxm4-80gb A100 v100 rtx-3090 H100 b200 cpu tpu")
_MACHINES: Final = words(
    "{stored} {inferred} {measured} dgx-a100 dgx-h100 {slower} {traced} {plan}"
)
_FILES: Final = words("""
{stored} {inferred} {traced} {plan} {budget} {tmp} {measured} {log} {nccl} {runs} {throughput} {cluster}
{columns} {steps} {config} {yaml} {clauses} {goodput} {validation} {folder} {truth} {net} {observations}
/dev/null /dev/zero {tmp}/missing /proc/self/mem .
""")
_FIELDS: Final = words("""
network.bandwidth network.latency network.algorithm device memory.bandwidth precision accumulation bucket_cap
batch devices layout loader.samples_per_s ranks.noise device.speed link.gbps overlap zero micro_batch sequence
""")


def _form(form: str, *parts: Drawn) -> Drawn:
    return st.builds(form.format, *parts)


def _list(each: Drawn, separator: str = ",") -> Drawn:
    return joined(each, separator, least=1, most=4)


_QUANTITY: Final = _form("{}{}", _NUMBER, one([*_UNITS, ""]))
_OBSERVED: Final = st.one_of(
    _form("{} GPUs: {} s", _INTEGER, _NUMBER),
    _form("{} nodes of {}: {} tokens/s per GPU", _INTEGER, _INTEGER, _NUMBER),
    _form("{}x{}: {}", _INTEGER, _INTEGER, _QUANTITY),
    _form("{} GPUs {} {}", _INTEGER, layouts, _QUANTITY),
    _form("MFU {}%, {} GPUs", _NUMBER, _INTEGER),
)
_TIER: Final = _form(
    "{} {}", _INTEGER, st.one_of(_QUANTITY, one(words("nvlink3 eth-100 ib-ndr x")))
)
_SETTING: Final = st.one_of(_QUANTITY, one(words("ring tree bf16 h100-sxm5 none")))
_CHOICES: Final = texts("""
--budget quick standard thorough x   --truth balanced two-nodes {truth} {cluster} x   --name a a/b
--log-format hf megatron torchtitan regex:(?P<s>[0-9.]+) regex:((a+)+)+$(?P<s>x) regex:(
--collective all_reduce all_gather broadcast x   --sources a100 nccl_times mlperf x a100,a100
--torch 2.1 2.12.0 1 x   --nccl 2.18.3 2.27 1 x
YYYY-MM-DD 2026-11-21 2026-02-30 0001-01-01 9999-12-31 2026-1-1 x
""")
#: What an option takes by its name, or else by what the help says of its value.
_VALUES: Final[dict[str, Drawn]] = {
    **{name: one(found) for name, *found in map(words, _CHOICES)},
    "--layout": layouts,
    "--set": _form("{}={}", one(_FIELDS), _SETTING),
    "--observed": _OBSERVED,
    "--part": _form("{}, {}", one(["a", "b", "node 3", ""]), _OBSERVED),
    "--cluster": st.one_of(one(["{cluster}", "{plan}"]), _list(_TIER, ", ")),
    "--nodes-like": one(_MACHINES),
    "--cause": _form("{}={}", one(["gpu", "net", "", "a b"]), _NUMBER),
    "--points": _list(_form("{}={}", _NUMBER, _NUMBER)),
    "--samples-per-s": _list(_form("{}={}", _NUMBER, _NUMBER)),
    "--workload": one(words("light heavy {traced} resnet18") * 4 + _MODELS),
    "--models": _list(one(_MODELS)),
    "--model": one(_MODELS),
    "--device": one(_DEVICES),
    "--master-addr": one(["127.0.0.1", "localhost", "x", ""]),
    "model": one(_MODELS),
    "name": one(_DEVICES + _MACHINES),
    "N": _INTEGER,
    "X": _NUMBER,
    "MINUTES": _NUMBER,
    "SIZE": _QUANTITY,
    "RATE": _QUANTITY,
    "N,N,...": _list(_INTEGER),
    "X,X,...": _list(_NUMBER),
    "FILE": one(_MACHINES[:5] * 6 + _MACHINES + [*_FILES, ""]),
}
#: What a command seldom does without.
_USUAL: Final = words("--profile --workload --set")
#: Options whose file is written: always below the folder of the command.
_WRITTEN: Final = words("--output --out --plot --export --trace --report --campaign")
_TARGETS: Final = [
    *words("written new/folder/written.json written.svg written.csv written.toml .hidden"),
    "a b",
]
#: No command line holds a zero, or half of a character.
_HOSTILE: Final = [text.replace("\0", "").encode("utf-8", "replace").decode() for text in HOSTILE]


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    names = getattr(command, "commands", {})
    if not names or path == ("validate",):
        yield path, command
    for name in names:
        yield from _commands(command.get_command(None, name), (*path, name))


#: Every command by its words.
COMMANDS: Final = dict(_commands(get_command(app)))


def _value(parameter: Any) -> Drawn:
    flag, metavar = parameter.opts[0], parameter.metavar or ""
    if flag in _WRITTEN:
        return one(_TARGETS)
    if metavar.startswith("["):
        usual = one(re.findall(r"[\w-]+", metavar))
    else:
        usual = _VALUES.get(flag, _VALUES.get(metavar, _VALUES["FILE"]))
    return st.one_of(*[usual] * 11, one(_HOSTILE))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A valid line, or any command with what it needs; some options more, each value of its kind or nonsense."""
    if is_valid := draw(st.booleans()):
        line = shlex.split(draw(one(_VALID)))
        path = next(found for n in (2, 1) if (found := tuple(line[:n])) in COMMANDS)
    else:
        path = draw(st.sampled_from(list(COMMANDS)))
        line = list(path)
    options = []
    for parameter in COMMANDS[path].params:
        flag = parameter.opts[0]
        is_option = flag.startswith("-")
        if is_option and not re.search("help|version|completion", flag):
            options.append(parameter)
        if not is_valid and (parameter.required or (not is_option and draw(st.booleans()))):
            line += [flag] * is_option + [draw(_value(parameter))]
    chosen = draw(st.lists(st.sampled_from(options), max_size=3)) if options else []
    if not is_valid:
        usual = [each for each in options if each.opts[0] in _USUAL and each not in chosen]
        chosen += [each for each in usual if draw(st.integers(0, 7))]
    for each in chosen:
        flag, value = each.opts[0], []
        if not getattr(each, "is_flag", False):
            value = [draw(_value(each))]
        if value and flag in line and draw(st.booleans()):
            line[line.index(flag) + 1 : line.index(flag) + 2] = value
        else:
            line += [flag, *value]
    return line


_MODULES: Final = ["Own()"] * 12 + texts("""
nn.Linear(4, 3)   nn.Sequential()   nn.Linear(4, 3).double()   nn.LazyLinear(3)   nn.Embedding(5, 4)   nn.LSTM(4, 3)
nn.Conv2d(4, 3, 1)   nn.BatchNorm1d(4)   nn.Dropout(1.0)   nn.MultiheadAttention(4, 2)   nn.Linear   None   7   Own
nn.Linear(4, 3, device='meta')   nn.Linear(4, 3).requires_grad_(False)   nn.Linear(4, 10**9, device='meta')
nn.ModuleList([nn.Linear(4, 3)])   nn.ParameterDict()   lambda x: x   nn.Linear(4, 3).half()   nn.Linear(4, 0)
nn.Sequential(*[nn.Linear(4, 4) for _ in range(300)])   nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
nn.Sequential(*[nn.Linear(4, 4)] * 5)   torch.jit.script(nn.Linear(4, 3))   nn.TransformerEncoderLayer(4, 2)
nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))   Deep()   torch.fx.symbolic_trace(nn.Linear(4, 3))
nn.Linear(4, 3, dtype=torch.complex64)
""")
_INPUTS: Final = ["torch.zeros(2, 4)"] * 12 + texts("""
torch.zeros(0, 4)   torch.zeros(4)   torch.zeros(())   torch.ones(1, 4, dtype=torch.long)   []   {}   None   'x'
torch.zeros(1, 4).to_sparse()   torch.full((1, 4), float('nan'))   torch.zeros(1, 4, device='meta')   iter([1])
torch.zeros(1, 4, requires_grad=True)   (torch.zeros(1, 4),) * 2   {'input': torch.zeros(1, 4)}
{1: torch.zeros(1, 4)}   torch.zeros(1, 4).expand(7, 4)   torch.zeros(1, 4, dtype=torch.complex64)
torch.zeros(4, 4)[::2]   torch.zeros(1, 4).numpy()   torch.zeros(10**6, 4)   nn.Parameter(torch.ones(1, 4))
{'input': {'input': [torch.zeros(1, 4)]}}   (torch.zeros(1, 4), 3, 'x', None)   torch.zeros(1, 4).bool()
""")
_LOSSES: Final = [""] * 8 + texts("""
, lambda out: out.sum()   , lambda out: out   , lambda: 1   , lambda out: None   , lambda out: 1 / 0   , 3
, lambda out: out.sum().item()   , lambda out: out.detach().sum()   , nn.MSELoss()   , 1, 2, 3   , lambda a, b: a
, lambda out: out.sum() * float('nan')   , lambda out: out.sum().backward()
""")
#: Whoever runs a factory runs its code. Out of scope is what breaks Python itself, as ``builtins.len = None`` or
#: ``os._exit(0)``: nothing is left that could complain.
_STATEMENTS: Final = ["pass"] * 12 + texts(r"""
raise RuntimeError('no\x1b[31m licence')   raise KeyError   raise Strange   raise SystemExit(0)   raise SystemExit('x')
sys.exit(3)   raise KeyboardInterrupt   raise RecursionError   raise MemoryError('x')   raise StopIteration
raise OSError(2, 'x', 'y\x1b')   raise BrokenPipeError   raise GeneratorExit   return   await x   (   assert False
raise ExceptionGroup('x', [ValueError('y')])   import missing_module   from perfmodel import missing   x = 1 / 0
os.chdir('/')   sys.argv.clear()   sys.stdout = None   warnings.simplefilter('error')   warnings.warn('\x1b[31m')
torch.set_default_dtype(torch.float64)   torch.set_grad_enabled(False)   torch.set_default_device('meta')
gc.disable()   logging.basicConfig(level=10)   os.environ.clear()   sys.setrecursionlimit(60)   sys.path.clear()
torch.manual_seed(10**30)   torch.inference_mode().__enter__()   signal.signal(signal.SIGINT, signal.SIG_IGN)
torch.autograd.set_detect_anomaly(True)   raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')   print('{' * 100)
torch.use_deterministic_algorithms(True)   raise type('A' * 3000, (Exception,), {})('b' * 3000)
torch.zeros(10**13)   torch.zeros(3)[5]   torch.ops.aten.missing()   random.seed = None
""")
_FORWARDS: Final = ["return self.inner(x)"] * 6 + texts("""
return x   return None   return 3   return x.sum().item()   return self.inner(x) if x.sum() > 0 else x   return [x, {}]
return torch.randn(int(x.shape[0]) ** 2, 4)   return self.inner(x).nonzero()   return self.inner(x.detach())
return self.inner(x.numpy())   return self.inner(x)[x.shape[0] - 1]   return self.inner(x.repeat(x.shape[0], 1))
return self.inner(x).to('cuda')   return self.forward(x)   self.inner = nn.Linear(4, 4); return self.inner(x)
return self.inner(torch.zeros(3, 4))   return self.inner(x).backward()   return torch.linalg.svd(self.inner(x))
return torch.fft.fft(self.inner(x))   return torch.sort(self.inner(x))[0]   return self.inner(x).unique()
return (self.inner(x) for _ in range(2))   return self.inner(x).cumsum(0) / x.shape[0]   self.inner.weight.data = x
self.inner.weight.grad = None; return self.inner(x)   torch.cuda.synchronize(); return self.inner(x)
return torch.stack([self.inner(row) for row in x])   return torch.utils.checkpoint.checkpoint(self.inner, x)
""")
_MODULE: Final = """
import gc, logging, os, random, signal, sys, warnings
import torch
from torch import nn
class Strange(Exception):
    def __str__(self): raise self
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
_SPOILT: Final = [
    *("", "\0", "\ufeff", "def make(", "\x1b[31m", "# coding: x\n", "make = 3", "\t\n  x"),
    "from __future__ import x\n",
]
_ASKING: Final = ["trace {factory}:make --output o.json"] * 4 + texts("""
trace {factory}:make   trace {factory}:make --json   trace {factory}:missing   trace {factory}:   trace {factory}
trace {factory}:make --precision bf16 --output o.json
trace {factory}:make --checkpointing per-block --micro-batch 3 --output o.json
trace {factory}:make --device-kind as-cuda --optimizer adamw --output o.json
memory --workload {factory}:make --device h100-sxm5 --json
predict --machine dgx-a100 --workload {factory}:make --devices 1,8 --json
explain --machine dgx-a100 --workload {factory}:make
whatif --machine dgx-a100 --workload {factory}:make --devices 8 --set network.bandwidth=2x
diagnose {factory}:make --device h100-sxm --precision bf16 --micro-batch 1 --observed '8 GPUs: 3 s'
""")


@st.composite
def factories(draw: st.DrawFn) -> tuple[str, str]:
    """The text of a module with a factory, and the command that asks for it."""
    text = _MODULE.format(
        outside=draw(one(_STATEMENTS)),
        inside=draw(one(_STATEMENTS)),
        in_forward=draw(one(_STATEMENTS)),
        forward=draw(one(_FORWARDS)),
        model=draw(one(_MODULES)),
        example=draw(one(_INPUTS)),
        loss=draw(one(_LOSSES)),
    )
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(one(_SPOILT)) + text[at:]
    return text, draw(one(_ASKING))
