package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
)

// remains is what one thing that the configuration names turned out to be.
type remains struct {
	What   string `json:"what"`
	Name   string `json:"name"`
	Result string `json:"result"` // removed, none, in use or kept
	Note   string `json:"note,omitempty"`
}

func cleanupCommand(a *app) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove what a crashed run left behind; it may be repeated, and needs no gateway",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			c, _, err := loadConfig(file)
			if err != nil {
				return err
			}
			var found []remains
			var failed []error
			for _, l := range c.API.Listen {
				if l.Network != "unix" {
					continue
				}
				r, err := cleanSocket(l.Address)
				if err != nil {
					failed = append(failed, err)
					continue
				}
				found = append(found, r)
			}
			for _, t := range c.TUN {
				found = append(found, inspectDevice("/sys/class/net", t.Device))
			}
			return errors.Join(append(failed, a.printRemains(found))...)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file that names what to look for (default "+defaultConfig+", else the embedded one)")
	return cmd
}

func (a *app) printRemains(found []remains) error {
	if a.json {
		return a.printJSON(map[string][]remains{"remains": found})
	}
	for _, r := range found {
		line := fmt.Sprintf("%s %s: %s", r.What, r.Name, r.Result)
		if r.Note != "" {
			line += ": " + r.Note
		}
		if err := a.printf("%s\n", line); err != nil {
			return err
		}
	}
	return nil
}

// cleanSocket removes the socket of a dead process.
func cleanSocket(path string) (remains, error) {
	r := remains{What: "socket", Name: path, Result: "none"}
	removed, err := api.RemoveStale(path)
	switch {
	case err != nil:
		return r, err
	case removed:
		r.Result = "removed"
	default:
		if _, err := os.Lstat(path); err == nil {
			r.Result, r.Note = "in use", "a gateway answers"
		}
	}
	return r, nil
}

// inspectDevice looks for a device of that name. The kernel removes ours with the
// process that opened them, so that one which is there has another owner: it is
// told, and never removed.
func inspectDevice(sys, name string) remains {
	r := remains{What: "device", Name: name, Result: "none"}
	flags, err := os.ReadFile(filepath.Join(sys, name, "tun_flags"))
	if err == nil {
		r.Result, r.Note = "kept", fmt.Sprintf("it belongs to a running process, or was made by hand (flags %s): ip link delete %s", trim(flags), name)
		return r
	}
	if _, err := os.Stat(filepath.Join(sys, name)); !errors.Is(err, fs.ErrNotExist) {
		r.Result, r.Note = "kept", "it is no TUN device: choose another name in tun.device"
	}
	return r
}

// trim is the text of a sysfs file.
func trim(b []byte) string {
	for len(b) > 0 && b[len(b)-1] == '\n' {
		b = b[:len(b)-1]
	}
	return string(b)
}
