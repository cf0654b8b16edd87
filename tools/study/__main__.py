"""Rebuild the pages of results from docs/results, or take over those of a new study first.

python -m tools.study                     # docs/results.md, the pages in docs/results, and their picture
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
from tools.study.guards import GUARDS, LEVELS, UNGUARDED
from tools.study.page import gradients_page, paper_page, results_page, tables_page
from tools.study.trials import KEPT, TRIED

PAGES = {
    Path("docs/results.md"): results_page,
    KEPT / "paper.md": paper_page,
    KEPT / "tables.md": tables_page,
    KEPT / "gradients.md": gradients_page,
}
PICTURE = Path("docs/images/study.png")


def take(study: Path, kept: Path) -> None:
    """Replace each part that a study's folder holds by what the pages need of it: the jobs' JSONs, levels of guards,
    diagnoses without samples. Other parts stay."""
    read_whole(study)  # all of it, before anything is replaced
    if study.resolve() == kept.resolve():
        raise InputError(f"--take {study}: these are the results that are kept; give the folder of another study")
    new = kept.with_name(f".{kept.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(kept, new)
    others = [name for name in (GUARDS, UNGUARDED, *TRIED) if (study / name / JOBS).exists()]
    for part in (".", *parts_in(study), *others):
        _replace(study / part, new / part)
    shutil.rmtree(kept)
    new.rename(kept)


def _replace(study: Path, kept: Path) -> None:
    for name in (JOBS, LEVELS, DIAGNOSES):
        shutil.rmtree(kept / name, ignore_errors=True)
    for name in (JOBS, LEVELS):
        for file in (study / name).glob("*.json"):
            (kept / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, kept / name / file.name)
    for job, file in diagnoses_in(study).items():
        (kept / DIAGNOSES).mkdir(parents=True, exist_ok=True)
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
    for path, page in PAGES.items():
        write_bytes(path, page(whole).encode())
    jobs, diagnoses = (sum(map(len, of)) for of in zip(*((p.results, p.diagnoses) for p in whole.every), strict=True))
    print(f"wrote {', '.join(map(str, PAGES))} and {PICTURE} from {jobs} jobs and {diagnoses} diagnoses in {KEPT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
