"""Measuring a target and its draft against their peers on the user's own machine.

answers.py     what is measured of one answer; every figure comes from these
clock.py       where a round's time goes, measured from outside the loop
memory.py      peak memory of a stretch of work
systems.py     what a system is; our loop with any drafter
peers.py       transformers' own generate, mlx-lm's stream_generate
http.py        OpenAI-compatible servers; counters.py what they publish of acceptance
reading.py     their event streams and pages, within bounds
datasets.py    names and files -> prompts
run.py         systems interleaved prompt by prompt, every answer on disk at once
parallel.py    several processes share the prompts
figures.py     every figure, defined and computed here and nowhere else
results.py     results.json
report.py      report.html; pictures.py its plots
compare.py     two results.json
"""
