"""What is known of every block. `catalog` holds the rows, `laws` what must hold between them."""

from kvstore.catalog.catalog import ABSENT_ROW, Catalog

__all__ = ["ABSENT_ROW", "Catalog"]
