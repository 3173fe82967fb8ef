"""What people read of verdicts: tables, reports for upstreams, bundles, and whether a pack is sound."""
