// Package flow holds the nouns and seams that every room of the gateway speaks:
// what a flow is, where it goes, what carries it out, how its bytes are counted
// and why it ended. It has no behaviour of its own beyond naming things.
package flow
