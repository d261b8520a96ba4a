"""One file for each family of models: what its config.json says and what it leaves unsaid.

`common` reads what all of them share; a family's `parse` states the rest.
"""
