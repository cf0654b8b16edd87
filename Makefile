# The two main commands: `make demo` trains and evaluates the embedded model, `make test` is the gate. Both install what
# they need into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread: the models of the demo and the tests are small, and more threads can be slower on a busy machine.
RUN := OMP_NUM_THREADS=1
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: demo test gate test-full browser trackio smoke-gpu study results lint docs clean

demo: $(READY)
	@rm -rf runs/demo
	$(RUN) $(BIN)/marble train configs/mini-demo.yaml --out runs/demo
	$(RUN) $(BIN)/marble evaluate runs/demo --images 2
	@echo
	@echo "Before and after, same prompts and seeds: runs/demo/evaluation/grid.png"
	@echo "Next, for example:"
	@echo "  $(BIN)/marble report runs/demo    # one page: curves, coefficients, pictures, conclusions"
	@echo "  $(BIN)/marble sample runs/demo --prompt 'a blue sign that says \"K7\"'"
	@echo "  $(BIN)/marble train configs/mini-demo.yaml --set 'balance={type: weighted_sum}' --out runs/sum"
	@echo "  $(BIN)/marble train configs/mini.yaml"

# mypy runs beside pytest, whose two workers leave some of two cores idle.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint gate

gate: $(READY)
	$(RUN) $(BIN)/pytest -n 2 --dist worksteal -m "not full"

test-full: $(READY) browser trackio
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torchao wandb av  # for the tests of int8, of a tracker and of MP4
	$(RUN) $(BIN)/pytest -n 2 --dist worksteal -m full

# On a machine with a CUDA GPU; prints a block of text to paste into an issue. SMOKE="--device cuda:1" takes another GPU.
smoke-gpu: $(READY)
	TRANSFORMERS_VERBOSITY=error DIFFUSERS_VERBOSITY=error $(RUN) $(BIN)/python -m tools.gpu_check $(SMOKE)

# The study of docs/results.md: many hours on two cores. It can be stopped at any time; the same command continues it.
study: $(READY)
	MARBLE=$(BIN)/marble PYTHON=$(BIN)/python scripts/study.sh runs/study
	$(BIN)/python -m tools.study --take runs/study

# Write docs/results.md again from the results in docs/results.
results: $(READY)
	$(BIN)/python -m tools.study

# Debian's Chromium, for the tests of HTML reports.
browser:
	@command -v chromium >/dev/null || $(SUDO) sh -c "apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium"

# Trackio needs an older Pillow than the pinned one, so it is installed into a separate folder, which its test adds to the
# import path.
trackio: $(VENV)/trackio
$(VENV)/trackio: $(READY)
	grep -v -i '^pillow==' constraints.txt > $(VENV)/trackio.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade -c $(VENV)/trackio.txt --target $@ trackio
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m tools.config_reference > docs/config.md

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ocr,tesseract]"
	@touch $(READY)

clean: # keeps runs/, which holds trained models
	rm -rf $(VENV) build
