"""What came out of runs? Records with their seals, summaries, tables, exports, and the W&B mirror."""
