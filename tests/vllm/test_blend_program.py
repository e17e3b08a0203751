"""`python -m forebay.vllm.blend` with real vLLM: what it has stored and blended is there for other processes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import PATIENCE_S, SEED, environment, generate, settings

#: Tokens of a block of vLLM's, and of what the tests store.
BLOCK, BEGIN, SEGMENTS = 32, 40, (150, 120)
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", str(BLOCK))


def program(folder: Path, model: str, command: str, lines: list[dict[str, Any]], *more: str, status: int = 0) -> list[dict[str, Any]]:
    """What it prints, of which each line must be JSON."""
    (folder / "cache").mkdir(exist_ok=True)
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = ("--model", model, "--cache-dir", str(folder / "cache"))
    more_settings = {key: value for key, value in settings(folder / "cache").items() if key in ("capacity", "min_free", "chunk_size")}
    which = [text for key, value in more_settings.items() for text in ("--set", f"{key}={value}")]
    run = [sys.executable, "-m", "forebay.vllm.blend", command, str(folder / "lines.jsonl"), *where, *which, *more, "--", *OPTIONS]
    done = subprocess.run(run, env=environment(folder, separate=True), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == status, (done.stdout + done.stderr)[-6000:]
    print(done.stdout[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_it_stores_and_blends_is_served_by_a_server_that_knows_nothing_of_it(model: str, tmp_path: Path) -> None:
    source = random.Random(SEED)
    begin = "".join(source.choices("abcdefgh ", k=BEGIN))
    first = "".join(source.choices("abcdefgh ", k=SEGMENTS[0]))
    second, question = ([source.randrange(4, 512) for _ in range(count)] for count in (SEGMENTS[1], 60))
    segments = [{"segment": first}, {"segment": second, "anchor": begin}]
    (tmp_path / "begin.txt").write_text(begin)
    anchor = ("--anchor-file", str(tmp_path / "begin.txt"))

    (stored,) = program(tmp_path, model, "store", segments, *anchor, "--json")
    assert (stored["segments"], stored["stored"], stored["there"], stored["failed"]) == (2, 2, 0, 0)
    # A byte of the text is a token of this model.
    assert stored["computed_tokens"] == 2 * BEGIN + sum(SEGMENTS)

    # One more, which is longer than the model's prompts may be.
    too_long = {"segment": [5] * 1000}
    (again,) = program(tmp_path, model, "store", [*segments, too_long], *anchor, "--json", status=1)
    assert (again["stored"], again["there"], again["failed"], again["computed_tokens"]) == (0, 2, 1, 0)
    assert again["failures"][0]["line"] == 3
    assert "max_model_len" in again["failures"][0]["error"]

    prompts: list[dict[str, Any]] = [{"segments": [second, first], "question": question, "select": select} for select in ("first-k", "none")]
    missing = {"segments": [[7] * 50], "question": question, "anchor": "other"}
    made = program(tmp_path, model, "blend", [*prompts, prompts[0], missing], *anchor)
    assert [one["line"] for one in made] == [1, 2, 3, 4]
    assert [[of["state"] for of in one["segments"]] for one in made] == [["reused"] * 2, ["reused"] * 2, [], ["missing"]]
    assert [one["was_there"] for one in made] == [False, False, True, False]
    covered = -(-(BEGIN + sum(SEGMENTS)) // BLOCK) * BLOCK
    assert made[0]["covered"] == covered
    assert (made[0]["recomputed"], made[1]["recomputed"], made[1]["reused"]) == (round(0.15 * 120) + round(0.15 * 150), 0, sum(SEGMENTS))
    assert made[0]["cache_salt"] == made[2]["cache_salt"] != made[1]["cache_salt"]
    assert all(one["cache_salt"].startswith("forebay-blend:") for one in made)

    asked = [{"prompts": [one["prompt"]], "salt": one["cache_salt"]} for one in made[:2]]
    plain = {"prompts": [made[0]["prompt"]]}
    served = generate(tmp_path, *asked, plain, model=model, cache=settings(tmp_path / "cache"), engine={"max_model_len": 1024, "block_size": BLOCK})
    assert [served.cached(number) for number in range(3)] == [[covered], [covered], [0]]
    tokens = [served.tokens(number) for number in range(3)]
    assert tokens[1] != tokens[2], "otherwise nothing shows that it is the blend which is served"
