"""What everything stands on: words, errors, files, the cache, strict parsing; nothing here knows a pack."""
