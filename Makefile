.PHONY: style quality test test-fast docs

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
	python -m pytest -n 2 --dist worksteal tests/unit

docs:
	python docs/build_api_reference.py build/api
