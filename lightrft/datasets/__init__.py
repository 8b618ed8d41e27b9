"""Converts files and rows of any known schema to prompts and demonstrations, in a seeded, resumable order."""
