"""Worker side of an incident, pure: what this iteration's sums hold, who computes and fetches what, in which order."""
