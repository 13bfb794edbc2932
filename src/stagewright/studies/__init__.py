"""The five studies: each runs from profile to report, and answers its questions in sentences with measured numbers.

    Options ─► Study (parts, conclude) ─► run_study ─► parts/NAME.json ─► conclude ─► table.md, answers.md,
                                           │  missing parts only             (pure)     figures/, report.html
                                           └► runs/… a run folder for every plan that was run

    framework/    what every study is built from: Study, Part, option declarations, tables, phrases
    parts/        work that parts of several studies share: profiles, forecasts, training, traces
    runner/       load a study, run its parts in a folder, write its findings
    NAME/         one study: options, study, measured, tables, answers

To write a study, add a package NAME (`stages` is the example to follow):

1. `options.py`: `Options`, a frozen dataclass of plain JSON values. Declare each field once with
   `option(default, help, quick=…)`, or `setting(default)` if it is not on the command line: command, help and --quick
   come from it. `machine_defaults` fills in what depends on the machine. The docstring is the help of the command.
2. `study.py`: `build_study(options) -> Study` lists the parts: `Part(name="run-2-blocks", about="2 stages, split by
   blocks", run=function, needs=("split",))`. The function receives a `PartContext` and returns plain JSON data with
   unrounded numbers. `context.results["split"]` is the data of a part that it needs; `context.run(plan)` runs a plan in
   the study's `runs/`; `context.note(text)` shows progress. Keep parts small (one run each): each is saved when it is
   done and never repeated. Names of parts depend on the options only; a part that turns out to be unnecessary returns
   data that says so.
3. `measured.py`, `tables.py`, `answers.py`: pure functions from `Results` to measured values, tables (`study_table`),
   figures (`Figure`: a name, a caption and a function that draws into a path; `report/` draws) and answers (`Answer`: a
   question and sentences with their numbers). `conclude` in `study.py` combines them into `Findings`.
   `results.get(name)` is None if a part failed: say what is unknown. `run_study` adds an answer with the failed parts.
4. Add NAME to `STUDIES` in `runner/load.py`, a page in docs/studies, and tests with hand-made parts: different
   measurements must give different sentences, and no missing part may raise.

A part that raises is saved with its reason; the others still run, and the command exits with 1. After an interruption
the same command continues in the unfinished folder of the same options; `--continue FOLDER` also repeats failed parts.
"""

from __future__ import annotations

from stagewright.studies.framework.study import Answer, Figure, Findings, Part, PartContext, Results, Study
from stagewright.studies.runner.run import Outcome, run_study

__all__ = ["Answer", "Figure", "Findings", "Outcome", "Part", "PartContext", "Results", "Study", "run_study"]
