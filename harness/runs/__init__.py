"""How is one run made? From a request to its parts, driven to its end, and the same run again."""
