// Package wg is the place of WireGuard devices and peers. There is nothing in it yet.
package wg
