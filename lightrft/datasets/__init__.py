"""Files and rows of any known schema -> prompts and demonstrations, in a seeded, resumable order."""
