"""Tests; a package, so that folders of tests can be packages of it."""
