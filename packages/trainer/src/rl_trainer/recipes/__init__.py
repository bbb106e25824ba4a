"""Recipes: the shipped ones, and those that are made of the settings of another framework."""
