// Package links has a cloud and an edge, each a process in a network of its own, talk
// over a bad link: packets that are late, lost, overtaken, small, or gone without a
// word, and an edge whose address changes. The link is rig's emulator, so the kernels
// at both ends do what they would do.
package links
