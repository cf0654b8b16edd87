"""Attacks on marble: seeded, counted, and kept where one succeeds (docs/reliability.md).

python -m tools.campaign --minutes 10

Each part (`PARTS` in `__main__.py`) makes one attack after another from a seed: a hostile config, a damaged run, a kill
at a file operation, a reward that misbehaves. What an attack must not do is the same for all (`attack.faults_of`); what
a part promises beyond that stands in its own file.
"""
