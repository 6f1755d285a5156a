// Package arch holds the rules about the shape of the whole module, as tests: which
// package may import which, and why. It contains nothing else.
package arch
