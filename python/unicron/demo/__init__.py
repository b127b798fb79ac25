"""The main job on one machine: a GPT trained undisturbed and disturbed, and the two compared."""
