"""Recipes that come with the package; `fledge train NAME` finds them here."""
