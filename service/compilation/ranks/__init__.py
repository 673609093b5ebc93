"""Several ranks that come to one verdict, also where some of them fail."""
