.PHONY: style quality test

style:
	ruff check --fix .
	ruff format .

quality:
	ruff check .
	ruff format --check .
	mypy

test:
	python -m pytest -n 2 --dist worksteal
