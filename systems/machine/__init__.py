"""What does this machine give? Files that are really written, and processes that run this very code."""
