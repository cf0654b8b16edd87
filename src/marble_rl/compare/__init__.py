"""`marble compare`: train several methods under one budget, evaluate them on the same prompts, write the table.

methods.py      what each method changes in the config
selection.py    from --methods and --seeds to a list of them
jobs.py         one job per method and seed; what makes two jobs the same
job_result.py   the JSON of a job, which is all that the table is made from
runner.py       runs jobs as processes, several at a time (cli/child.py: one of them, display.py: progress)
resume.py       what is left to do, and whether what is there may stand beside it
statistics.py   z-scores, intervals over seeds and over prompts
figures.py      means, composites and differences with their intervals
shares.py       gains in units of what a training on one reward alone gains
table.py        rows, differences, holes
writing.py      table.md, compare.json, compare.csv (picture.py: compare.png)
command.py      the command itself

side_by_side.py runs that exist, compared as they are (side_by_side_table.py: on the terminal)
"""
