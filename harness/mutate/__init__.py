"""Wrong fixes: generated from fix.patch or written by hand, and each judged by the checks of its pack."""
