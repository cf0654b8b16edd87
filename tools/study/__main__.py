"""Rebuild docs/results.md from the results in docs/results, or take over those of a new study first.

python -m tools.study                     # docs/results.md and its figures, from docs/results
python -m tools.study --take runs/study   # the same, from the jobs and diagnoses of a study that was run again
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from marble_rl.compare.jobs import JOBS
from marble_rl.compare.picture import draw
from marble_rl.diagnose.record import Diagnosis
from marble_rl.errors import InputError
from marble_rl.storage import write_bytes
from tools.study.findings import DIAGNOSES, diagnoses_in, parts_in, read_whole
from tools.study.page import gradients_page, results_page

KEPT = Path("docs/results")
PAGE = Path("docs/results.md")
GRADIENTS = KEPT / "gradients.md"
PICTURE = Path("docs/images/study.png")


def take(study: Path, kept: Path) -> None:
    """Replace what is kept by what the page needs of a study's folder: the jobs' JSONs, diagnoses without samples."""
    read_whole(study)  # all of it, before anything is replaced
    if study.resolve() == kept.resolve():
        raise InputError(f"--take {study}: these are the results that are kept; give the folder of another study")
    new = kept.with_name(f".{kept.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    for part in (".", *parts_in(study)):
        _copy(study / part, new / part)
    shutil.rmtree(kept, ignore_errors=True)
    new.rename(kept)


def _copy(study: Path, kept: Path) -> None:
    for folder in (kept / JOBS, kept / DIAGNOSES):
        folder.mkdir(parents=True)
    for file in (study / JOBS).glob("*.json"):
        shutil.copy(file, kept / JOBS / file.name)
    for job, file in diagnoses_in(study).items():
        Diagnosis.read(file).model_copy(update={"samples": []}).write(kept / DIAGNOSES / f"{job}.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, metavar="DIR", help="folder of a comparison whose results are taken over")
    given = parser.parse_args()
    try:
        if given.take is not None:
            take(given.take, KEPT)
        whole = read_whole(KEPT)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    draw(whole.study.table, PICTURE)
    write_bytes(PAGE, results_page(whole).encode())
    write_bytes(GRADIENTS, gradients_page(whole).encode())
    jobs, diagnoses = (sum(map(len, of)) for of in zip(*((p.results, p.diagnoses) for p in whole.every), strict=True))
    print(f"wrote {PAGE}, {GRADIENTS} and {PICTURE} from {jobs} jobs and {diagnoses} diagnoses in {KEPT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
