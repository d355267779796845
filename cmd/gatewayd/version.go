package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// built is what the binary knows of its making.
type built struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
}

func buildInfo() built {
	b := built{Version: version, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			b.Revision = s.Value
		}
	}
	return b
}

func versionCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			b := buildInfo()
			if a.json {
				return a.printJSON(b)
			}
			return a.printf("gatewayd %s %s/%s %s\n", b.Version, b.OS, b.Arch, b.Go)
		},
	}
}
