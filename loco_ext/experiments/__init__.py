"""Training runs on real data, from the data to the figures. They need the libraries of the extra ``demo``."""

from loco_ext.extras import need

need(
    "loco_ext.experiments",
    {
        "sklearn": "scikit-learn",
        "matplotlib": "matplotlib",
        "tqdm": "tqdm",
        "rich": "rich",
        "PIL": "pillow",
    },
)
