"""What a run knows of itself: lengths, speeds and costs, from priors and from what was observed."""
