"""Hooks that repeat an update and compare: is it deterministic, is it the same op by op?"""
