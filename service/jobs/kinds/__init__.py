"""Defines the kinds of jobs: one declaration each, one registry, and what ``/v1/kinds`` lists of them."""
