PYTHON ?= python3
BIN := .venv/bin
SGLANG_DIR ?= build/sglang

.PHONY: apply test test-fast bench-apply wheel lint clean

apply: .venv/installed
ifeq ($(SGLANG_DIR),build/sglang)
	$(BIN)/python apply.py fetch $(SGLANG_DIR)
endif
	$(BIN)/python apply.py --sglang-dir $(SGLANG_DIR)

test: .venv/tools lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-fast: .venv/tools
	$(BIN)/python -m pytest tests/patchset

bench-apply: .venv/tools
	$(BIN)/python -m ci.bench_apply

wheel: .venv/tools
	$(BIN)/python -m ci.build_wheel $(if $(PIN),--pin $(PIN))

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows ci/workflows/*.yml
	$(BIN)/shellcheck .ci/run ci/jobs/*.sh ci/gpu/multi.sh
	$(BIN)/zizmor --quiet --offline --no-progress --config ci/zizmor.yml ci/workflows/*.yml
	$(BIN)/sglang-overlay lint
	$(BIN)/sglang-overlay export --check

clean:
	rm -rf .venv build dist

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/tools: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
