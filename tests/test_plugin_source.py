"""Warnings from a plugin's source name each suspect use with its line, and do not name other code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from hydra.utils import get_class

from dpgen_bench.config.compose import compose_config
from dpgen_bench.testing.source import read_plugin
from dpgen_bench.utils.paths import CONF

LINES = {
    "with open('x') as f: pass": "open",
    "print('x')": "print",
    "import pickle": "import pickle",
    "import numpy as np; np.save('x', [1])": "numpy.save",
    "import numpy as np; x = np.load": "numpy.load",
    "import torch; torch.save({}, 'x')": "torch.save",
    "from torch import load": "import torch.load",
    "from torchvision import datasets": "import torchvision.datasets",
    "import torchvision; torchvision.datasets.MNIST('x')": "torchvision.datasets.MNIST",
    "from sklearn.datasets import load_digits": "import sklearn.datasets.load_digits",
    "from dpgen_bench.data.datasets import Mnist": "import dpgen_bench.data.datasets.Mnist",
    "from dpgen_bench.data.npz import Npz": "import dpgen_bench.data.npz.Npz",
    "from dpgen_bench import run": "import dpgen_bench.run",
    "from dpgen_bench.config.building import build_dataset": "import dpgen_bench.config.building.build_dataset",
    "import dpgen_bench.store.folders": "import dpgen_bench.store.folders",
    "from dpgen_bench.outcomes import listing": "import dpgen_bench.outcomes.listing",
    "import numpy as np; x = np.genfromtxt('x')": "numpy.genfromtxt",
    "import pandas as pd": "import pandas",
    "from PIL import Image; x = Image.open('x')": "PIL.Image.open",
    "from torchvision.models import resnet18": "import torchvision.models.resnet18",
    "from concurrent.futures import ProcessPoolExecutor": "import concurrent.futures.ProcessPoolExecutor",
    "import subprocess": "import subprocess",
    "import os; x = os.environ['HOME']": "os.environ",
    "import socket": "import socket",
    "from urllib.request import urlopen": "import urllib.request.urlopen",
    "import requests": "import requests",
    "def f():\n    global seen\n    seen = 1": "global seen",
    "def f(x, kept=[]): return kept": "a mutable default of f",
    "import gc": "import gc",
    "x = (lambda: 0).__closure__": ".__closure__",
    "def f(data): return data._ledger": "._ledger",
    "from pathlib import Path; Path('x').write_text('y')": ".write_text",
    "from pathlib import Path; Path('x').open()": ".open",
    "def f(image): image.save('x')": ".save",
    "def f(model): return model.from_pretrained('x')": ".from_pretrained",
    "import os; os.utime('x', (0, 0))": "os.utime",
    "import sys; sys.stdout.write('x')": "sys.stdout.write",
    "import dpgen_bench.data.npz; x = dpgen_bench.data.npz.Npz": "dpgen_bench.data.npz.Npz",
    "import torch.utils._python_dispatch": "import torch.utils._python_dispatch",
    "from torch.overrides import TorchFunctionMode": "import torch.overrides.TorchFunctionMode",
    "import dpgen_bench.privacy.mechanism as m; m.add_noise = None": "dpgen_bench.privacy.mechanism.add_noise is set",
    "import dpgen_bench.method as m; setattr(m, 'x', 1)": "setattr of dpgen_bench.method",
    "from torch import Tensor; del Tensor.add": "torch.Tensor.add is set",
    "import operator; x = operator.attrgetter": "operator.attrgetter",
    "x = type('X', (), {})": "type(name, bases, namespace)",
    "from dpgen_bench.privacy.key import Key": "import dpgen_bench.privacy.key.Key",
}


@pytest.mark.parametrize(("line", "what"), LINES.items(), ids=LINES.values())
def test_each_suspect_use_is_named_with_its_line(line, what, tmp_path, monkeypatch):
    path = tmp_path / "suspect.py"
    indented = "\n".join(f"    {part}" for part in line.splitlines())
    path.write_text(f"class Plugin:\n    pass\n\n\ndef never_called():\n{indented}\n")
    module = load(path, monkeypatch)
    findings = read_plugin(module.Plugin)
    assert what in {finding.what for finding in findings}
    assert all(finding.line >= 6 and str(finding).startswith(f"{path}:{finding.line}: ") for finding in findings)


def load(path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("suspect", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "suspect", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "method").glob("*.yaml")))
def test_methods_of_the_bench_raise_no_warning(name):
    assert read_plugin(get_class(compose_config([f"method={name}"]).method["_target_"])) == []


def test_own_private_names_and_public_names_of_others_give_no_warning(tmp_path, monkeypatch):
    path = tmp_path / "suspect.py"
    path.write_text(
        "import dpgen_bench.data.private\n\n\nclass Plugin:\n"
        "    def fit(self, data: dpgen_bench.data.private.PrivateData):\n"
        "        self._net = data.n\n        return super()._fit, self._net\n"
    )
    assert read_plugin(load(path, monkeypatch).Plugin) == []


def test_modules_of_the_plugins_own_package_are_read_too(tmp_path, monkeypatch):
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "nets.py").write_text("def net():\n    print('x')\n")
    (folder / "plugin.py").write_text("import math\n\nfrom .nets import net\n\n\nclass Plugin:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = read_plugin(importlib.import_module("own_package.plugin").Plugin)
    assert (finding.path.name, finding.line, finding.what) == ("nets.py", 2, "print")


def test_a_helper_next_to_the_plugin_is_read_too_and_libraries_are_not(tmp_path, monkeypatch):
    (tmp_path / "suspect_helper.py").write_text("import pickle\n")
    (tmp_path / "suspect_plugin.py").write_text(
        "import numpy\nimport yaml\n\nfrom suspect_helper import pickle\n\n\nclass Plugin:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    findings = read_plugin(importlib.import_module("suspect_plugin").Plugin)
    assert {(finding.path.name, finding.what) for finding in findings} == {("suspect_helper.py", "import pickle")}
