"""The picture of docs/performance.md, from measurements as `marble bench` writes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from PIL import Image

from marble_rl.bench.measure import Spread
from marble_rl.bench.workload import STEPS
from tools.bench_picture import main


def test_it_is_drawn_from_the_file_of_a_bench(tmp_path: Path) -> None:
    speeds = {step.name: asdict(Spread(0.8, 0.7, 0.9)) for step in STEPS}
    (tmp_path / "bench.json").write_text(json.dumps({"speed": speeds}))
    main(tmp_path, tmp_path / "cost.png")
    with Image.open(tmp_path / "cost.png") as picture:
        assert picture.width > 600
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10, "more than an empty sheet"
