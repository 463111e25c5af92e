"""Recipes: TOML files, each a whole run; package data."""
