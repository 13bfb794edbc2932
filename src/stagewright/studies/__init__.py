"""The five studies: each runs from profile to report, and answers its questions in sentences made of what it measured.

    options ─► Study (parts, conclude) ─► run_study ─► parts/NAME.json ─► conclude ─► table.md, answers.md,
                                           │  missing parts alone            (pure)     figures/, report.html
                                           └► runs/… the run folders of what really ran

To write a study, `my.py` in this package (`stages` is the example to follow):

1. Choose options that are plain JSON values (numbers, texts, lists): they name the study, tell whether an unfinished
   folder is of the same study, and stand in `study.json`.
2. List its parts: `Part(name="run-2-blocks", about="2 stages, cut by blocks", run=function, needs=("split",))`. The
   function takes a `Bench` and returns plain JSON data, measured numbers not rounded. `bench.results["split"]` is the
   data of a part that it needs; `bench.run(plan)` runs a plan in the study's `runs/`, `bench.tell(text)` shows what
   goes on. Make parts small (one run each): one is saved as soon as it is done, and what was done is not done again.
   Names of parts follow from the options alone; a part that turns out to be needless returns data that says so.
3. Write `conclude(results) -> Findings`, a pure function over `Results` in a file of its own (`my_findings.py`): tables
   (`Table`), answers (`Answer`: a question and sentences with their numbers) and drawings (`Drawing`: a name, a caption
   and a function that draws into a path; the figure itself is made in `report/`). `results.get(name)` is None where a
   part failed: say what is not known, and go on. What failed is added to the answers by `run_study`.
4. Give the module the three names of `load.py`: `Options` (a frozen dataclass; its defaults are the full size), `QUICK`
   (the defaults of --quick) and `study(options) -> Study`. Add a command in `cli/study/my.py` (arguments, then
   `conduct(context, given, …)`; what is None is left to the defaults) to `cli/study/__init__.py`, a page in
   docs/studies, and tests with hand-made parts: other measurements must give other
   sentences, and no missing part may raise.

A part that raises is recorded with its reason; the rest goes on, and the command ends with 1. Interrupted, the same
command goes on in the unfinished folder of the same options; `--resume FOLDER` also repeats parts that failed.
"""

from __future__ import annotations

from stagewright.studies.runner.run import Outcome, run_study
from stagewright.studies.framework.study import Answer, Bench, Drawing, Findings, Part, Results, Study, Table

__all__ = ["Answer", "Bench", "Drawing", "Findings", "Outcome", "Part", "Results", "Study", "Table", "run_study"]
