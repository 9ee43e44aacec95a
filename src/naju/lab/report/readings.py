"""What a reader of the experiments' pages has to know to read them."""

from naju.lab.diagnostics import SUCCESS
from naju.lab.throughput import RIVAL

INTERVAL = (
    "In brackets after a difference: its 95 % interval over seeds, by Student's t with the smaller number of seeds "
    "less one as its degrees of freedom, and wider by half of the paper's last digit. A single seed of ours has none. "
    "Deviations are sample standard deviations; the paper does not always say which it prints."
)
CELLS = (
    "In a cell: our mean ± its sample standard deviation over seeds (runs that differ in their random numbers alone), "
    "the worst seed, what the paper prints, and the difference with its interval."
)
SWEEP_READING = (
    "T2 asks for a fact that was written once, anywhere in the sequence (retention); T4 asks for the latest of several "
    "values (overwriting). T4@2048 is the share of right answers on T4 at length 2048. d is a model's width, N the "
    "size of its state a channel. The last column counts the seeds that learned T4: their best validation accuracy at "
    f"the training length is above {SUCCESS}.",
    f"{CELLS} In parentheses: the paper's worst seed.",
)
RECALL_READING = (
    "A sequence begins with pairs of a key and a value. Then keys come back, and the model has to name the value of "
    "each. A slice is a number of pairs in sequences of one length; numbers are mean shares of right answers a "
    "sequence, over all slices and on the hardest. N is the size of the state a channel; “reparam” is Naju with "
    "reparameterised gates, “mlstm” the paper's xLSTM.",
    CELLS,
)
LRA_READING = (
    "Five classifications of long sequences: nested list operations (listops), film reviews read byte by byte (text), "
    "whether one paper cites another (retrieval), pictures read pixel by pixel (image), and whether two points in a "
    "picture are joined by a line (pathfinder)."
)
SPEED_READING = (
    f"In parentheses: the ratio to {RIVAL}'s number of the same run, so that below 1 is less time or memory, and above "
    "1 more tokens a second. Eager runs operation by operation, graph replays a recorded CUDA graph, compiled is "
    "torch.compile. Columns are sequence lengths."
)
