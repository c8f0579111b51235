"""Programs as users of lmtrain write them; run from the folder above."""
