"""What is installed and what is built; names, dependencies and tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["plsc", "plsc.*"]),
    package_data={"plsc": ["py.typed", "recipes/*.toml"]},
)
